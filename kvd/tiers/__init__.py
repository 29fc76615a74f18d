"""Storage levels: slabs of slots, and the memory behind them."""
