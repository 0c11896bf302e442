"""What run.sh prints becomes the tables of the page of measurements."""

import figures

PRINTED = """\
2026-11-27 NVIDIA H100 80GB HBM3, 580.159
JAX 0.11.2 [CudaDevice(id=0)]
ops            staged    2 ranks  passed
bandwidth      staged    1 ranks  passed
    allreduce              1 KiB       71.3 us     0.01 GiB/s
    allreduce           4096 KiB      739.0 us     5.29 GiB/s
    allreduce by hand      1 KiB      268.0 us     0.00 GiB/s
bandwidth      nccl      1 ranks  FAILED: no end after 120 s
    allreduce              1 KiB       54.0 us     0.02 GiB/s
bandwidth-0.9.1 staged    1 ranks  passed
    allreduce              1 KiB      435.0 us     0.00 GiB/s
bandwidth      nccl      2 ranks  cannot be used here
loops          staged    1 ranks  passed
    allreduce SUM 4 B                        4.7 us
loops          staged    2 ranks  passed
    allreduce SUM 4 B                    12345.6 us
1 failures, 400 s
"""


def test_tables():
    found = figures.figures(PRINTED)
    assert figures.bandwidth(found).splitlines() == [
        "| us | `staged` | `nccl` | `cuda-mpi` | `ucx` | by hand | 0.9.1 (copies) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 rank, `allreduce` 1 KiB | 71 | 54 |  |  | 268 | 435 |",
        "| 1 rank, `allreduce` 4 MiB | 739 |  |  |  |  |  |",
    ]
    assert figures.loops(found).splitlines() == [
        "| us | `staged`, 1 | `staged`, 2 |",
        "| --- | ---: | ---: |",
        "| allreduce SUM 4 B | 5 | 12,346 |",
    ]
