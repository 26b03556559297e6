"""Times dense half-precision products of Llama-3.1 layer shapes through PyTorch, for `cuda_check speed`.

Prints one `"ROWSxCOLS bBATCH": microseconds` a line (for prompts `tTOKENS`, whose products are not bound by memory), and the rate of a device-to-device copy (bytes read and written). Each
time is the median of graph replays over enough matrices to fill 2 GB, so that no cache helps.
"""
import torch

SHAPES = [(4096, 4096), (1024, 4096), (6144, 4096), (14336, 4096), (28672, 4096), (4096, 14336),
          (8192, 8192), (10240, 8192), (28672, 8192), (57344, 8192), (8192, 28672)]
PROMPTS = [(4096, 4096, 4096), (4096, 4096, 1024), (4096, 4096, 512), (14336, 4096, 1024), (14336, 4096, 512),
           (4096, 14336, 1024), (4096, 14336, 512)]
COLD = 2 << 30


def median_ms(run, repeats=7):
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def main():
    print("{")
    source = torch.empty(COLD, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    ms = median_ms(lambda: target.copy_(source))
    print(f'"copy GB/s": {2 * COLD / ms / 1e6:.1f},')
    del source, target
    for rows, cols in SHAPES:
        count = max(2, COLD // (2 * rows * cols))
        weights = [torch.randn(rows, cols, dtype=torch.float16, device="cuda") for _ in range(count)]
        for batch in (1, 2, 4, 8):
            x = torch.randn(batch, cols, dtype=torch.float16, device="cuda")
            out = torch.empty(batch, rows, dtype=torch.float16, device="cuda")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for w in weights[:2]:
                    torch.mm(x, w.t(), out=out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for w in weights:
                    torch.mm(x, w.t(), out=out)
            graph.replay()
            torch.cuda.synchronize()
            print(f'"{rows}x{cols} b{batch}": {1e3 * median_ms(graph.replay) / count:.3f},', flush=True)
        del weights
    for rows, cols, tokens in PROMPTS:
        weights = [torch.randn(rows, cols, dtype=torch.float16, device="cuda") for _ in range(4)]
        inputs = [torch.randn(tokens, cols, dtype=torch.float16, device="cuda") for _ in range(4)]
        for x, w in zip(inputs, weights):
            torch.mm(x, w.t())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for x, w in 10 * list(zip(inputs, weights)):
                torch.mm(x, w.t())
        graph.replay()
        torch.cuda.synchronize()
        print(f'"{rows}x{cols} t{tokens}": {1e3 * median_ms(graph.replay) / 40:.3f},', flush=True)
    print('"unit us": 1\n}')


main()
