"""Rewards: completion text to a number. Never imports JAX, and is useful on its own.

A reward is a function that a user of TRL has written already; `contract.py` says what it gets
and gives, and calls it. To add one, write it in a file of this package: a public function with
a parameter named `completions` is known to configs by its name, with no other registration.
"""
