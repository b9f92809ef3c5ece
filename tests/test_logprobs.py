"""Log-probs: against float64, cut into chunks or not, and never all logits at once."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grpo.logprobs import entropy_of, log_softmax_at, logits, token_logprobs

pytestmark = pytest.mark.usefixtures("strict")

P, G, T, D, V = 2, 3, 8, 5, 40


def batch(seed: int = 0, scale: float = 1.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(0, scale, (P, G, T, D)).astype(np.float32)
    table = rng.normal(0, 1, (V, D)).astype(np.float32)
    return hidden, table, rng.integers(0, V, (P, G, T)).astype(np.int32)


def slow(
    hidden: np.ndarray, table: np.ndarray, tokens: np.ndarray, temperature: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies by their definitions, one position at a time, in float64."""
    logps, entropies = np.zeros(tokens.shape), np.zeros(tokens.shape)
    temperature = np.broadcast_to(temperature, tokens.shape)
    for at in np.ndindex(*tokens.shape):
        scores = [float(np.dot(np.float64(hidden[at]), np.float64(w))) for w in table]
        scores = np.array(scores) / temperature[at]
        all_logps = scores - scores.max()
        all_logps -= math.log(np.exp(all_logps).sum())
        logps[at] = all_logps[tokens[at]]
        entropies[at] = -sum(math.exp(x) * x for x in all_logps)
    return logps, entropies


@functools.cache
def jitted(chunk: int, entropy: bool = True) -> Any:
    return jax.jit(functools.partial(token_logprobs, entropy=entropy, chunk=chunk))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_agrees_with_float64(temperature):
    hidden, table, tokens = batch()
    found = jitted(0)(hidden, table, tokens, temperature)
    logps, entropies = slow(hidden, table, tokens, temperature)
    assert found.logps.dtype == found.entropy.dtype == jnp.float32
    np.testing.assert_allclose(found.logps, logps, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropy, entropies, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 3])
def test_every_prompt_may_have_its_own_temperature(chunk):
    hidden, table, tokens = batch()
    temperature = np.array([0.5, 2.0], np.float32).reshape(P, 1, 1, 1)
    found = jitted(chunk)(hidden, table, tokens, temperature)
    logps, entropies = slow(hidden, table, tokens, temperature[..., 0])
    np.testing.assert_allclose(found.logps, logps, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropy, entropies, rtol=1e-5, atol=1e-5)


def test_worked_by_hand():
    # h W^T = [0, ln 3]: of 1 + 3, and at temperature 1/2 of 1 + 9
    hidden = jnp.array([[1.0, 0.0]])
    table = jnp.array([[0.0, 5.0], [math.log(3), 7.0]])
    for temperature, likely in ((1.0, 3 / 4), (0.5, 9 / 10)):
        found = token_logprobs(hidden, table, jnp.array([1]), temperature, entropy=True)
        np.testing.assert_allclose(found.logps, [math.log(likely)], rtol=1e-6)
        rare = 1 - likely
        entropy = -likely * math.log(likely) - rare * math.log(rare)
        np.testing.assert_allclose(found.entropy, [entropy], rtol=1e-6)


def test_log_softmax_and_entropy_of_any_leading_axes():
    scores = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]]))
    found = log_softmax_at(scores, jnp.array([[0, 2]]))
    np.testing.assert_allclose(found, np.log([[0.5, 0.7]]), rtol=1e-6)
    np.testing.assert_allclose(entropy_of(scores)[0, 0], 1.5 * math.log(2), rtol=1e-6)


def test_huge_scores_neither_overflow_nor_lose_the_likely_token():
    scores = jnp.array([[3e4, 3e4 - 1.0, -3e4], [-1e5, -1e5, -1e5]])
    tokens = jnp.array([1, 2])
    # log(e^-1 / (1 + e^-1)), and one of three alike
    expected = [-1.0 - math.log1p(math.exp(-1)), -math.log(3)]
    np.testing.assert_allclose(log_softmax_at(scores, tokens), expected, atol=0.01)
    np.testing.assert_allclose(entropy_of(scores)[1], math.log(3), atol=0.02)
    np.testing.assert_allclose(entropy_of(jnp.zeros((1, V))), [math.log(V)], rtol=1e-6)
    np.testing.assert_allclose(entropy_of(jnp.array([0.0, -1e30])), 0.0, atol=1e-7)


@functools.cache
def values_and_gradients(chunk: int) -> Any:
    hidden, table, tokens = batch()
    weights = np.random.default_rng(1).normal(size=tokens.shape).astype(np.float32)

    def loss(hidden, table):
        found = token_logprobs(hidden, table, tokens, 0.7, entropy=True, chunk=chunk)
        return jnp.sum(found.logps * weights), found

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, table)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 8, 100])
def test_chunks_change_neither_values_nor_gradients(chunk):
    whole, by_chunks = values_and_gradients(0), values_and_gradients(chunk)
    assert jax.tree.structure(whole) == jax.tree.structure(by_chunks)
    for a, b in zip(jax.tree.leaves(by_chunks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, strict=True)


def test_gradient_is_softmax_less_one_hot():
    hidden, table, tokens = batch()
    loss = lambda h: -jnp.sum(token_logprobs(h, table, tokens, 2.0, chunk=3).logps)  # noqa: E731
    found = jax.jit(jax.grad(loss))(hidden)
    scores = hidden.astype(np.float64) @ table.T / 2.0
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = (weights - np.eye(V)[tokens]) @ table / 2.0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_entropy_is_only_there_when_asked_and_has_no_gradient():
    hidden, table, tokens = batch()
    assert jitted(0, entropy=False)(hidden, table, tokens, 1.0).entropy is None
    assert jitted(3, entropy=False)(hidden, table, tokens, 1.0).entropy is None
    entropy = lambda h: jnp.sum(token_logprobs(h, table, tokens, 1.0, entropy=True).entropy)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(entropy))(hidden), 0.0)


def test_bfloat16_states_give_float32_logits():
    hidden, table, tokens = batch(scale=4.0)
    rough = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, table)]
    scores = logits(*rough, 0.7)
    assert scores.dtype == jnp.float32
    # what was rounded before the product is the only rounding: not the product, nor its sum
    exact = [np.asarray(x, np.float64) for x in rough]
    found = token_logprobs(*rough, jnp.asarray(tokens), 0.7, entropy=True)
    logps, entropies = slow(*exact, tokens, 0.7)
    np.testing.assert_allclose(found.logps, logps, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(found.entropy, entropies, rtol=1e-4, atol=2e-5)
    rounded = np.asarray(scores.astype(jnp.bfloat16), np.float64)
    assert np.max(np.abs(rounded - exact[0] @ exact[1].T / 0.7)) > 0.05  # that would be seen


# --- How much exists at once ---------------------------------------------------------------------


def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shape of every array of a jaxpr, inner jaxprs included."""
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            yield variable.aval.shape
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def largest(jaxpr: Any) -> int:
    return max(math.prod(shape) for shape in shapes(jaxpr))


@pytest.mark.parametrize("chunk", [1, 3])
def test_all_logits_never_exist_at_once(chunk):
    hidden, table, tokens = batch()

    def loss(hidden, table, chunk):
        found = token_logprobs(hidden, table, tokens, 0.7, entropy=True, chunk=chunk)
        return jnp.sum(found.logps), found.entropy

    def trace(chunk):
        function = functools.partial(loss, chunk=chunk)
        grad = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
        return jax.jit(grad).trace(hidden, table)

    # 40 tokens are many and 5 dimensions few, so logits are the largest arrays there are
    assert largest(trace(0).jaxpr.jaxpr) == P * G * T * V
    traced = trace(chunk)
    assert largest(traced.jaxpr.jaxpr) == P * G * chunk * V
    # and the compiler did not put them together again: no buffer, whatever its shape, holds them
    text = traced.lower().compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert P * G * chunk * V in sizes
    assert max(sizes) < P * G * T * V / 2
