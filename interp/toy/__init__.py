"""A small vision-language model written natively in TransformerLens."""

from interp.toy.bound import Bound, BoundVision
from interp.toy.config import StackConfig, ToyConfig
from interp.toy.native import NativeVLM
from interp.toy.vlm import ToyVLM

__all__ = ["Bound", "BoundVision", "NativeVLM", "StackConfig", "ToyConfig", "ToyVLM"]
