"""Hooks that cannot fail silently: what is off says so, and how to turn it on.

TransformerLens accepts a hook on a point that never fires (its issue 1688), and cuts rotated
queries along the wrong axis (`pos_slice`); `GatedHooks` refuses the one and mends the other.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice

from interp import sites
from interp.errors import InputError

GATES = {
    "hook_result": "set_use_attn_result",
    "hook_q_input": "set_use_split_qkv_input",
    "hook_k_input": "set_use_split_qkv_input",
    "hook_v_input": "set_use_split_qkv_input",
    "hook_attn_in": "set_use_attn_in",
    "hook_mlp_in": "set_use_hook_mlp_in",
}
"""Hooks that fire only once their flag is on, and what turns it on."""


class GatedHooks(HookedRootModule):
    """A root module on which a hook that cannot fire is refused instead of ignored."""

    cfg: Any

    def config_of(self, name: str) -> Any:
        """The configuration whose flags decide about a hook."""
        return self.cfg

    def why_off(self, name: str) -> str | None:
        """Why a hook would not fire as documented now, and what to do; None if it does."""
        leaf, cfg = name.split(".")[-1], self.config_of(name)
        setter = GATES.get(leaf)
        if setter and not getattr(cfg, setter.removeprefix("set_")):
            return f"{name} is off: call {setter}(True) first"
        if leaf in _PATTERNS and cfg.use_fused_attention:
            return f"{name} is off: attention is fused; call set_use_fused_attention(False) first"
        if ".ln1." in f".{name}" and cfg.use_split_qkv_input:
            return (
                f"{name} fires three times with split inputs: call set_use_split_qkv_input(False)"
            )
        if ".ln1." in f".{name}" and cfg.use_attn_in:
            return f"{name} has one copy a head with attn_in: call set_use_attn_in(False)"
        return None

    def live(self, names: Any) -> list[str]:
        """The hooks that a name, a list or a predicate chooses.

        Raises:
            InputError: a hook that does not exist, or that is named and off, or a predicate that
                chooses only hooks that are off.
        """
        if callable(names):
            chosen = [n for n in self.hook_dict if names(n)]
            on = [n for n in chosen if self.why_off(n) is None]
            if on or not chosen:
                return on
            raise InputError(self.why_off(chosen[0]) or "")
        chosen = [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in self.hook_dict:
                raise sites.UnknownSiteError(name, self.hook_dict)
            if (reason := self.why_off(name)) is not None:
                raise InputError(reason)
        return chosen

    # Every way in: hooks() and run_with_hooks(), add_hook(), check_and_add_hook().

    def _enable_hook(self, name: Any, hook: Callable, dir: Any) -> None:
        for one in self.live(name):
            super()._enable_hook(one, hook, dir)

    def add_hook(self, name: Any, hook: Callable, *args: Any, **kwargs: Any) -> None:
        for one in self.live(name):
            super().add_hook(one, hook, *args, **kwargs)

    def check_hooks_to_add(self, hook_point: HookPoint, hook_point_name: str, *_: Any, **__: Any):
        self.live(hook_point_name)

    def add_caching_hooks(self, *args: Any, **kwargs: Any) -> dict:
        kept, hooks, _ = self.get_caching_hooks(*args, **kwargs)
        for name, hook in hooks:
            self.add_hook(name, hook)
        return kept

    def get_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict, list, list]:
        """As the parent's, cut along the axis that `interp.sites` calls pos (query in patterns).

        Without a filter, scores and patterns are left out: at 375 tokens they are two thirds of
        the memory. Pictures have no pos axis and stay whole. What is kept is a copy: the streams
        after one block and before the next are one tensor, which a hook may change in place.
        """
        if incl_bwd:
            raise InputError(
                "incl_bwd is not offered here; take gradients with torch.autograd.grad on what"
                " ToyVLM.run(..., grad=True) keeps"
            )
        if names_filter is None:
            names_filter = all_but_patterns
        kept: dict = {} if cache is None else cache
        cut = Slice.unwrap(pos_slice)

        def keep(activation: Tensor, hook: HookPoint) -> None:
            if remove_batch_dim and len(activation) != 1:
                raise InputError(
                    f"remove_batch_dim with {len(activation)} rows or pictures at {hook.name};"
                    " it takes one row with at most one picture"
                )
            value, axes = activation.detach(), sites.axes(site_of(hook.name or ""))
            axis = next((i - len(axes) for i, a in enumerate(axes) if a in ("pos", "query")), None)
            if axis is not None and "batch" in axes:
                value = cut.apply(value, dim=axis)
            value = value[0] if remove_batch_dim else value
            kept[hook.name] = value.to(device or value.device, copy=True)

        return kept, [(name, keep) for name in self.live(names_filter)], []

    # --- flags --------------------------------------------------------------------------------

    @property
    def configs(self) -> tuple[Any, ...]:
        """All configurations that a flag is set on."""
        return (self.cfg,)

    def _set(self, flag: str, on: bool) -> None:
        before = [getattr(cfg, flag) for cfg in self.configs]
        for cfg in self.configs:
            setattr(cfg, flag, on)
        dead = [n for n, p in self.hook_dict.items() if p.has_hooks() and self.why_off(n)]
        if dead:
            for cfg, value in zip(self.configs, before, strict=True):
                setattr(cfg, flag, value)
            raise InputError(f"{dead[0]} has a hook that would stop firing: reset_hooks() first")

    def set_use_attn_result(self, on: bool) -> None:
        self._set("use_attn_result", on)

    def set_use_split_qkv_input(self, on: bool) -> None:
        if on and any(cfg.use_attn_in for cfg in self.configs):
            raise InputError("split inputs and attn_in exclude each other: set_use_attn_in(False)")
        self._set("use_split_qkv_input", on)

    def set_use_attn_in(self, on: bool) -> None:
        if on and any(cfg.use_split_qkv_input for cfg in self.configs):
            raise InputError(
                "attn_in and split inputs exclude each other: set_use_split_qkv_input(False)"
            )
        self._set("use_attn_in", on)

    def set_use_hook_mlp_in(self, on: bool) -> None:
        self._set("use_hook_mlp_in", on)

    def set_use_fused_attention(self, on: bool) -> None:
        """Faster attention that keeps no scores and patterns, and norms without hooks in one pass:
        for training and evaluation. Answers change by rounding."""
        self._set("use_fused_attention", on)


_PATTERNS = ("hook_attn_scores", "hook_pattern")


def all_but_patterns(name: str) -> bool:
    """What a cache keeps unless it is asked for more."""
    return not name.endswith(_PATTERNS)


def site_of(hook: str) -> str:
    """`blocks.0.attn.hook_z` to `blocks.0.attn.z`."""
    return hook.replace("hook_", "")


def hook_of(site: str) -> str:
    """`blocks.0.attn.z` to `blocks.0.attn.hook_z`."""
    *path, name = site.split(".")
    return ".".join([*path, f"hook_{name}"])
