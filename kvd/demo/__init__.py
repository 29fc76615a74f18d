"""The main job on one machine: one engine computes a prefix, the next one loads it."""
