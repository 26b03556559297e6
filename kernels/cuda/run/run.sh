#!/bin/sh
# Parity and speed on a machine with a GPU and no compiler; everything it needs lies beside it. Each part has a limit, together 8 minutes.
set -u
cd "$(dirname "$0")"
echo "## parity"
timeout 90 ./cuda_check parity || exit 1
echo "## encoder"
timeout 45 ./cuda_check encode || echo "encoder: exit $? (124: out of time)"
echo "## compute-sanitizer, one scheme of each family"
if command -v compute-sanitizer >/dev/null; then
    timeout 75 compute-sanitizer --error-exitcode 9 ./cuda_check parity nuq-4 vq-2.5 tcq-2 tcq-fast-2 tcq-hyb-2.5 half-tcq-2.25 ||
        echo "compute-sanitizer: exit $? (124: out of time; an unsupported device says so above)"
else
    echo "skipped: no compute-sanitizer here"
fi
echo "## dense half-precision products (PyTorch)"
timeout 60 python3 dense.py >dense.json || echo "no PyTorch here: speed-ups are missing"
echo "## speed, cold caches, graph replay"
timeout 120 ./cuda_check speed dense.json
echo "## whole model, 8B shape: 2 bits, then half precision"
for what in "--scheme tcq-fast-2" "--f16"; do
    timeout 45 ./fracbit bench model --device cuda --shape llama-3-8b $what --prompt 128,1024 --rounds 3 ||
        echo "model $what: exit $? (124: out of time)"
done
