"""The history guard: which turn of an incoming history is which recorded one, and is its thinking intact?"""
