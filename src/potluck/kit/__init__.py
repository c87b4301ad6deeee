"""What methods are made of."""
