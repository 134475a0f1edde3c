"""PyTorch's attention (FlashAttention) at the shapes that `tidemill-bench kernels` measures, as the reference for our kernels.

Llama-3.1-8B: 32 query heads of 128, 8 of keys and values, causal, bf16. For rows behind a cached prefix PyTorch's mask is aligned to
the lower right.
"""

import torch
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# As `tidemill-bench kernels` measures: the median over graphs of this many calls.
CALLS, REPETITIONS = 20, 11


def median_ms(work):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(CALLS):
            work()
    marks = []
    for _ in range(REPETITIONS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in marks)[REPETITIONS // 2] / CALLS


def main():
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}")
    print("| attention | ms | GFLOP/s |\n|---|---:|---:|")
    for cached, rows in [(0, 8192), (0, 2048), (6144, 2048), (30720, 2048)]:
        positions = cached + rows
        q = torch.randn(1, HEADS, rows, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, KV_HEADS, positions, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        mask = bias.causal_lower_right(rows, positions)
        flop = 4 * HEADS * HEAD_DIM * rows * (cached + (rows + 1) / 2)
        for backend in [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]:
            attend = torch.nn.functional.scaled_dot_product_attention
            with sdpa_kernel(backend):
                try:
                    if cached == 0:
                        ms = median_ms(lambda: attend(q, k, v, is_causal=True, enable_gqa=True))
                    else:
                        ms = median_ms(lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True))
                except RuntimeError as error:
                    print(f"| 1 × {rows} of {positions}, {backend.name} | {str(error).splitlines()[0]} | |")
                    continue
            print(f"| 1 × {rows} of {positions}, {backend.name} | {ms:.4f} | {flop / ms / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
