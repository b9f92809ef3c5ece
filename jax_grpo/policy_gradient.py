"""What all algorithms share that sample: rewards become an experience, log-probs a loss.

`policy_gradient` makes an `Algorithm` from what a token costs, and checks its settings. The
constructors in `algorithms.py` are this with the defaults of their papers (`with_defaults`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from jax_grpo import advantages as adv
from jax_grpo import kl as kls
from jax_grpo import losses
from jax_grpo.arrays import masked
from jax_grpo.types import Algorithm, Experience, Outputs, PyTree, Rewards, Rollout, Scores, Term

Reduce = Callable[[Array, Array], tuple[Array, Array]]
# (rewards [P, G], valid [P, G]) -> advantages [P, G]
Advantage = Callable[[Array, Array], Array]
# (logps, ratio, advantages) -> the loss per token, and metrics per token
TokenLoss = Callable[[Array, Array, Array], tuple[Array, dict[str, Array]]]

# All but `raw` compare a completion with its group, and are 0 in a group of one.
ADVANTAGES: dict[str, Advantage] = {
    "standardized": adv.standardized,
    "centered": adv.centered,
    "leave_one_out": adv.leave_one_out,
    "batch_standardized": adv.batch_standardized,
    "standardized_biased": partial(adv.standardized, bessel=False),
    "mean_normalized": adv.mean_normalized,
    "rescaled": adv.rescaled,
    "raw": adv.raw,
}


def policy_gradient(
    token_loss: TokenLoss,
    *,
    reward_weights: Sequence[float] = (),
    standardize_each: bool = False,
    advantage: str | Advantage = "standardized",
    whiten: bool = False,
    ratio_level: Literal["token", "sequence", "product"] = "token",
    top_entropy: float = 1.0,
    reduction: str = "sequence_mean",
    reduction_length: int = 0,
    kl_weight: float = 0.0,
    kl_estimator: str = "k3",
    kl_in: Literal["loss", "reward", "reward_to_go"] = "loss",
    truncated: Literal["keep", "mask", "zero"] = "keep",
    importance_cap: float = 0.0,
    importance_level: Literal["token", "sequence", "product"] = "token",
    importance_mode: Literal["truncate", "mask"] = "truncate",
) -> Algorithm:
    """An algorithm that samples, from what a token costs it.

    Args:
      token_loss: of log-probs, ratio and advantages.
      reward_weights: one for each reward function; empty is 1 each.
      standardize_each: whether each function's rewards are standardized in their group before they
        are added up (GDPO, arXiv:2601.05242, with the advantage `batch_standardized`).
      advantage: the name of one of `ADVANTAGES`; from Python, a function like those.
      whiten: whether advantages are made mean 0 and deviation 1 over all tokens, at last. Then
        those of a constant group are no longer 0.
      ratio_level: of each `token`, or of the whole completion: `sequence` (geometric mean, GSPO)
        or `product` (RLOO).
      top_entropy: the share of tokens, those of the highest entropy, that the policy's loss is
        taken of (0.2: Wang et al. 2025, arXiv:2506.01939); the others still count in what it is
        divided by, and pay their KL, as in TRL.
      reduction: `sequence_mean`, `token_mean` or `constant_length`. What is masked counts in no
        divisor; TRL's `grpo` and `dr_grpo` still count the completions that it masks.
      reduction_length: what `constant_length` divides by, in tokens.
      kl_weight: β; 0 means no reference model at all.
      kl_estimator: `k1` (reward only), `k2`, `k3` or `k3_weighted` (loss only). `k3` is GRPO's and
        TRL's, whose gradient is forward KL's; reverse KL's is that of `k2` (verl's `k3+`) and of
        `k3_weighted` (TRL's `use_bias_correction_kl`). Tunix's default, k1 in the loss, is refused.
      kl_in: `loss` (per token), `reward` (summed over the completion) or `reward_to_go` (summed
        from each token on, and taken off its advantage, after the baseline).
      truncated: completions cut at the length limit are kept, masked out of the loss, or scored 0.
      importance_cap: c, the most that a token may weigh for being likelier by the training path,
        before the first update, than it was to the sampler, truncation by top-k, top-p or min-p
        included; 0 is off, and the ratio is then to the sampler (verl's bypass mode). Usual are 2
        (Yao et al. 2025, and verl) and 3 (TRL). It weighs the policy's loss, not a KL beside it.
      importance_level: as `ratio_level`. What TRL and verl call a sequence is the `product`.
      importance_mode: what weighs more than c weighs c (`truncate`) or nothing (`mask`, as in
        IcePop). TRL's default, `sequence_mask`, is level `product` and mode `mask`.

    Raises:
      ValueError: for a combination that makes no sense, with the reason.
    """
    if isinstance(advantage, str) and advantage not in ADVANTAGES:
        raise ValueError(f"advantage {advantage!r} is not one of: {', '.join(ADVANTAGES)}")
    check_not_negative(kl_weight=kl_weight)
    if advantage == "mean_normalized" and (standardize_each or kl_in == "reward"):
        raise ValueError(
            "advantage 'mean_normalized' wants rewards that are not negative: neither "
            "standardize_each nor kl_in 'reward' leaves them so"
        )
    if not 0 < top_entropy <= 1:
        raise ValueError(f"top_entropy is {top_entropy}: it must be more than 0 and at most 1")
    if top_entropy < 1 and ratio_level != "token":
        raise ValueError(
            "top_entropy picks tokens, but a ratio of the whole completion pulls at all of them: "
            "use ratio_level 'token'"
        )
    levels = ("token", "sequence", "product")
    for name, value, known in (
        ("ratio_level", ratio_level, levels),
        ("truncated", truncated, ("keep", "mask", "zero")),
        ("kl_in", kl_in, ("loss", "reward", "reward_to_go")),
        ("importance_level", importance_level, levels),
        ("importance_mode", importance_mode, ("truncate", "mask")),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not one of: {', '.join(known)}")
    if importance_cap and not importance_cap >= 1:
        raise ValueError(f"importance_cap is {importance_cap}: it must be 0 (off) or at least 1")
    if not importance_cap and (importance_level, importance_mode) != ("token", "truncate"):
        raise ValueError("importance_level and importance_mode want an importance_cap, which is 0")
    kls.check_kl_estimator(kl_estimator, "loss" if kl_in == "loss" else "reward")
    reduce = make_reduction(reduction, reduction_length)
    relative = ADVANTAGES[advantage] if isinstance(advantage, str) else advantage
    add_up = adv.total_standardized_reward if standardize_each else adv.total_reward
    # A KL in the reward is shown by k3, whatever estimates it there.
    shown_estimator = kl_estimator if kl_in == "loss" else "k3"

    def experience(
        rollout: Rollout, rewards: Rewards, scores: Scores, state: PyTree
    ) -> tuple[Experience, PyTree]:
        anchor, reference = rollout.behavior_logps, scores.reference_logps
        if kl_weight > 0 and reference is None:
            raise ValueError("kl_weight is not 0, so log-probs of the reference are needed")
        kept, values = losses.handle_truncated(
            truncated, rollout.mask, rewards.values, rollout.truncated
        )
        total, valid = add_up(values, rewards.valid, weights_of(reward_weights, rewards))
        judged, counted = rollout.mask & valid[..., None], kept & valid[..., None]
        importance = None
        if importance_cap:
            if scores.proximal_logps is None:
                raise ValueError("importance_cap is not 0, so the proximal log-probs are needed")
            anchor, drawn_with = (
                scores.proximal_logps,
                rollout.behavior_logps - rollout.kept_logmass,
            )
            importance = losses.truncated_importance(
                anchor, drawn_with, counted, importance_cap, importance_level, importance_mode
            )
        if reference is not None and kl_in == "reward":  # those cut pay for their KL, too
            total = kls.kl_in_reward(total, anchor, reference, judged, kl_weight, kl_estimator)
        advantages = relative(total, valid)
        if reference is not None and kl_in == "reward_to_go":
            kl = kls.kl_to_go(anchor, reference, judged, kl_estimator)
            advantages = advantages[..., None] - kl_weight * kl
        if whiten:
            by_token = advantages if advantages.ndim == counted.ndim else advantages[..., None]
            advantages = adv.whitened(jnp.broadcast_to(by_token, counted.shape), counted)
        mask = counted.astype(jnp.float32)
        behavior, proximal = rollout.behavior_logps, scores.proximal_logps
        experience = Experience(advantages, mask, behavior, reference, proximal)
        return experience._replace(importance=importance), state

    def loss(outputs: Outputs, experience: Experience) -> dict[str, Term]:
        assert outputs.logps is not None
        mask, logps = experience.mask, masked(outputs.logps, experience.mask)
        anchor = ratio_anchor(experience)
        ratio = losses.policy_ratio(logps, anchor, mask, ratio_level)
        policy, metrics = token_loss(logps, ratio, experience.advantages)
        metrics = {**metrics, "ratio": ratio}
        if (weight := experience.importance) is not None:
            policy = weight * policy
            lost = weight == 0.0 if importance_mode == "mask" else weight >= importance_cap
            metrics["sampling/importance_sampling_ratio/mean"] = weight
            metrics["sampling/importance_sampling_ratio/capped"] = lost
        if top_entropy < 1:
            if outputs.entropy is None:
                raise ValueError("top_entropy is less than 1, so the entropy of tokens is needed")
            policy = masked(policy, losses.top_entropy(outputs.entropy, mask, top_entropy))
        terms = {"policy_loss": Term(*reduce(policy, mask), 1.0)}
        if experience.reference_logps is not None:
            token_ratio = losses.policy_ratio(logps, anchor, mask)
            kl = kls.kl_penalty(
                shown_estimator, logps, experience.reference_logps, mask, token_ratio
            )
            terms["kl"] = Term(*reduce(kl, mask), kl_weight if kl_in == "loss" else 0.0)
        if outputs.entropy is not None:
            metrics["entropy"] = outputs.entropy
        return terms | {name: Term(*losses.token_mean(x, mask)) for name, x in metrics.items()}

    return Algorithm(
        "policy",
        experience,
        loss,
        group=1 if not standardize_each and (advantage == "raw" or callable(advantage)) else 2,
        needs_reference=kl_weight > 0,
        needs_proximal=importance_cap > 0,
        needs_entropy=True,
    )


def ratio_anchor(experience: Experience) -> Array:
    """The ratio's denominator: the proximal log-probs where the sampler is corrected for."""
    if experience.proximal_logps is None:
        return experience.behavior_logps
    return experience.proximal_logps


def with_defaults(
    *fixed: str, **defaults: Any
) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Gives a constructor's `**shared` the defaults of its paper, and spells its signature out.

    That signature is the schema of the algorithm's section in a config, and what `help` shows.

    Args:
      *fixed: settings of `policy_gradient` that the constructor leaves no choice of.
      **defaults: those of the others.
    """

    def decorate(constructor: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        @wraps(constructor)
        def defaulted(**settings: Any) -> Algorithm:
            return constructor(**{**defaults, **settings})

        written, shared = inspect.signature(constructor), inspect.signature(policy_gradient)
        parameters = [p for p in written.parameters.values() if p.kind is p.KEYWORD_ONLY]
        taken = {"token_loss", *fixed, *written.parameters}
        parameters += [
            p.replace(default=defaults.get(name, p.default))
            for name, p in shared.parameters.items()
            if name not in taken
        ]
        defaulted.__dict__["__signature__"] = written.replace(parameters=parameters)
        return defaulted

    return decorate


def make_reduction(name: str, length: int = 0) -> Reduce:
    """The reduction of that name: `token_mean`, `sequence_mean` or `constant_length`.

    Raises:
      ValueError: for an unknown name, a constant length without a length, or a length without it.
    """
    if name == "constant_length":
        if length < 1:
            raise ValueError("reduction 'constant_length' needs a reduction_length of at least 1")
        return lambda x, mask: losses.constant_length(x, mask, length)
    table = {"token_mean": losses.token_mean, "sequence_mean": losses.sequence_mean}
    if name not in table:
        raise ValueError(f"reduction {name!r} is not one of: {', '.join(table)}, constant_length")
    if length:
        raise ValueError(f"reduction_length is for 'constant_length', not for {name!r}")
    return table[name]


def weights_of(weights: Sequence[float], rewards: Rewards) -> Array:
    """The weights of the reward functions, [R] float32; empty is 1 each."""
    return jnp.asarray(weights or [1.0] * rewards.values.shape[-1], jnp.float32)


def check_not_negative(**numbers: float) -> None:
    """Refuses a setting that is negative, or no number.

    Raises:
      ValueError: naming it.
    """
    for name, number in numbers.items():
        if not number >= 0:  # NaN, too
            raise ValueError(f"{name} is {number}: it must be 0 or positive")
