"""KV of a GPU: kernels, copies between paged KV and slots, slabs of the GPU tier.

Imports neither CuPy nor torch until a device is opened, so that everything is importable and, with
another device behind `device.Device`, testable on a host without a GPU.
"""
