"""Reinforcement learning of language models from verifiable rewards, in JAX.

Nothing is imported here: `jax_grpo.rewards` is useful without JAX, and stays so. Import the
module that you need: `from jax_grpo import losses`.
"""

__version__ = "0.1.0"
