"""Which flags a machine needs, by arithmetic: weights, pools and concurrency of a layout, before anything is loaded."""
