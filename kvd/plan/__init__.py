"""`kvd plan`: how large KV is, when loading it wins, and what a fleet needs to hold. Pure.

`shape.py` knows models, `loading.py` compares loading with computing, `capacity.py` counts bytes
over hosts; `picture.py` draws, and is the only one that is not pure.
"""
