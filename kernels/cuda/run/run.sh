#!/bin/sh
# Parity and speed on a machine with a GPU and no compiler; everything it needs lies beside it. Each part has a limit, together six minutes.
set -u
cd "$(dirname "$0")" || exit 1
part() { # NAME SECONDS COMMAND...
    name=$1 seconds=$2
    shift 2
    timeout "$seconds" "$@"
    code=$?
    [ $code -eq 0 ] || echo "$name failed: exit $code (124: out of its $seconds s)" >&2
    return $code
}
echo "## parity"
part parity 75 ./cuda_check parity || exit 1
echo "## encoder"
part encoder 30 ./cuda_check encode
echo "## compute-sanitizer, one scheme of each family"
if command -v compute-sanitizer >/dev/null; then
    # Where it does not support the device it says so.
    part compute-sanitizer 40 compute-sanitizer --error-exitcode 9 \
        ./cuda_check parity nuq-4 vq-2.5 tcq-2 tcq-fast-2 tcq-hyb-2.5 half-tcq-2.25 int-4 gnuq-3 aq-m2v8
else
    echo "skipped: no compute-sanitizer on this machine"
fi
echo "## dense half-precision products (PyTorch)"
if python3 -c "import torch" 2>/dev/null; then
    part "dense products" 50 python3 dense.py >dense.json
else
    : >dense.json
    echo "skipped: no PyTorch on this machine; speed-ups and shares of the copy rate will be missing"
fi
echo "## speed, cold caches, graph replay"
part speed 75 ./cuda_check speed dense.json
echo "## what a step takes beside its products"
part parts 20 ./cuda_check parts
echo "## products, expansion and attention of prompts"
part prefill 25 ./cuda_check prefill
echo "## whole model, 8B shape: 2 bits, 4 bits, half precision"
for scheme in "--scheme tcq-fast-2" "--scheme vq-4" --f16; do
    # shellcheck disable=SC2086 # options are words
    part "model $scheme" 25 ./fracbit bench model --device cuda --shape llama-3-8b $scheme --prompt 128,1024 --rounds 3
done
