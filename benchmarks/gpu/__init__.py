"""Commands for a GPU that is lent for minutes, by stage; each writes results.json as it goes and table.md at its end.

    tests    python -m benchmarks.gpu.run --parts tests
    speed    python -m benchmarks.gpu.run --parts phases --batches windows conversations hybrid
    learn    python -m benchmarks.gpu.pretrained --stages smollm2-methods --seeds 200 201 202 203, then
             python -m benchmarks.gpu.methods results.json
    repeat   python -m benchmarks.gpu.repeat
    rooms    python -m benchmarks.gpu.pretrained --stages smollm2-rooms --winner "full weights"

`--shrink` rehearses each without a GPU (`repeat` and `pretrained` with `--generate`), as the tests of the benchmarks
marked `slow` do. `rooms` has no results from a GPU so far, and of `speed` neither hybrids, nor flex
attention and TRL's padding on conversations.
"""
