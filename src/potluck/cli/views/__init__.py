"""What commands show: the values for `--json`, and tables made of them."""
