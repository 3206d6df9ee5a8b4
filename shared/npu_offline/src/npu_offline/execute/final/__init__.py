"""Execution of final modules: what the compiler hands to hivmc, at the addresses and with the flags that it decided on."""
