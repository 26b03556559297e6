#!/bin/sh
# Parity and speed on a machine with a GPU and no compiler; everything it needs lies beside it. Some 8 minutes at most.
set -u
cd "$(dirname "$0")"
echo "## parity"
timeout 120 ./cuda_check parity || exit 1
echo "## compute-sanitizer, one scheme of each family"
if command -v compute-sanitizer >/dev/null; then
    timeout 100 compute-sanitizer --error-exitcode 9 ./cuda_check parity nuq-4 vq-2.5 tcq-2 tcq-fast-2 tcq-hyb-2.5 half-tcq-2.25 ||
        echo "compute-sanitizer: exit $? (124: out of time; an unsupported device says so above)"
else
    echo "skipped: no compute-sanitizer here"
fi
echo "## dense half-precision products (PyTorch)"
timeout 100 python3 dense.py >dense.json || echo "no PyTorch here: speed-ups are missing"
echo "## speed, cold caches, graph replay"
timeout 200 ./cuda_check speed dense.json
