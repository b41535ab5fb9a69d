"""Properties of single tensors: names, dtypes, storages, non-finite values."""
