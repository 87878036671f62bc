"""What settings of the runners were read off."""
