"""The Ascend compilers: fetched, kept in the cache folder, and called."""
