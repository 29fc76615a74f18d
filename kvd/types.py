"""Ids that cross module borders."""

from __future__ import annotations

from typing import NewType

Tenant = NewType("Tenant", str)
"""Who is charged and isolated; follows from the peer's uid, never from a message."""
OwnerId = NewType("OwnerId", int)
"""A session, for as long as it or its process may touch a slot."""
SlabId = NewType("SlabId", int)
"""A slab of this epoch; never used again for other memory."""
Generation = NewType("Generation", int)
"""One use of one slot; raised on each, over all slots, and never used again in an epoch."""
LeaseId = NewType("LeaseId", int)
"""A lease of this epoch."""
