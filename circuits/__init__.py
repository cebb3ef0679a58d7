"""Studies made with `interp`; each lists its findings, and the command that makes them again.

Counting (`python -m circuits counting diagnose --model tiny --all-seeds --out DIR`). The toy counts
to 39 in text and was shown pictures of up to 19 stones. Beyond 19 it fails with pictures while a
probe on its encoder is exact; so is one on an untrained encoder. Comparing amounts 1 to 3 apart,
pictures lose 17 to 31 points more than text beyond 19 (three seeds), so the amount itself does not
carry over, and the naming cannot be judged alone. Hiding white stones spoils answers as hiding
black ones does. Needed heads differ more between picture and text than within either, but pairs
that share none are rare.
"""
