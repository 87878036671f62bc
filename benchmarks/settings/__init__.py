"""Measurements that determined settings of the runners."""
