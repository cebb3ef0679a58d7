"""Where in a model an activation can be read or changed: the names, and the axes behind them.

A site is TransformerLens's activation name without `hook_`: `blocks.3.attn.z` is
`blocks.3.attn.hook_z`. Sites of the vision tower start with `vision.`.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from interp.errors import InputError

_RESID = ("resid_pre", "resid_mid", "resid_post", "attn_out", "attn.out", "mlp_out", "mlp_in")
_NORMS = ("ln1", "ln2", "ln_final")
_QKV = ("attn.q", "attn.k", "attn.v", "attn.rot_q", "attn.rot_k", "attn.z")
_STREAM_PER_HEAD = ("attn.attn_in", "attn.q_input", "attn.k_input", "attn.v_input", "attn.result")


def _axes(token: str, width: str) -> dict[str, str]:
    """Axes of every kind of site of a stack whose token axes are `token` and width is `width`."""
    return {
        "embed": f"{token} {width}",
        **{name: f"{token} {width}" for name in _RESID},
        **{f"{norm}.scale": f"{token} one" for norm in _NORMS},
        **{f"{norm}.normalized": f"{token} {width}" for norm in _NORMS},
        **{name: f"{token} head d_head" for name in _QKV},
        **{name: f"{token} head {width}" for name in _STREAM_PER_HEAD},
        "mlp.pre": f"{token} d_mlp",
        "mlp.post": f"{token} d_mlp",
    }


AXES: dict[str, str] = {
    **_axes("batch pos", "d_model"),
    "attn.attn_scores": "batch head query key",
    "attn.pattern": "batch head query key",
    "projector": "patch d_model",
    **{f"vision.{kind}": axes for kind, axes in _axes("patch", "d_vision").items()},
    "vision.attn.attn_scores": "image head query key",
    "vision.attn.pattern": "image head query key",
}
"""The axes of each kind of site, in order: the one place where a shape is decided.

The axis `patch` runs over all patches of all pictures of the batch, in the order of the patch
table (`Batch.patches`); the axis `image` over its pictures.
"""


class UnknownSiteError(InputError):
    """A site that this model does not have; the message names those that come close."""

    def __init__(self, site: str, known: Iterable[str]) -> None:
        known = list(known)
        near = get_close_matches(site, known, n=3) or known[:3]
        super().__init__(
            f"no site {site!r} in this model; close ones are {', '.join(near)}"
            f" (all {len(known)}: model.sites)"
        )


def kind(site: str) -> str:
    """The key of `AXES` that describes a site.

    >>> kind("vision.blocks.3.attn.z")
    'vision.attn.z'
    """
    parts = site.split(".")
    start = parts.index("blocks") if "blocks" in parts[:2] else None
    if start is not None:
        del parts[start : start + 2]
    return ".".join(parts)


def axes(site: str) -> tuple[str, ...]:
    """The axes of a site, in order.

    Raises:
        UnknownSiteError: no model has a site of this kind.

    >>> axes("blocks.0.attn.z")
    ('batch', 'pos', 'head', 'd_head')
    """
    if kind(site) not in AXES:
        raise UnknownSiteError(site, AXES)
    return tuple(AXES[kind(site)].split())


def layer(site: str) -> int | None:
    """The block that a site lies in; None outside the blocks.

    >>> layer("blocks.3.attn.z"), layer("ln_final.scale")
    (3, None)
    """
    parts = site.removeprefix("vision.").split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def select(known: Iterable[str], pattern: str) -> list[str]:
    """The sites that match a glob, in forward order.

    Raises:
        UnknownSiteError: none matches.

    >>> select(["blocks.0.attn.z", "blocks.0.attn_out", "blocks.1.attn.z"], "blocks.*.attn.z")
    ['blocks.0.attn.z', 'blocks.1.attn.z']
    """
    known = list(known)
    found = [site for site in known if fnmatchcase(site, pattern)]
    if not found:
        raise UnknownSiteError(pattern, known)
    return found
