"""Facts about single tensors: names, dtypes, storages, values that are not finite."""
