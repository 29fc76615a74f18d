"""What enters and leaves the tiers, for routers of a fleet: vLLM's KV events over ZeroMQ."""
