// Sizes and offsets of NCCL's own structures, in the order of `layouts_are_those_of_nccl`.
#include <cstddef>
#include <cstdio>
#include <nccl_rma.h>

int main() {
    for (size_t number : {sizeof(ncclRma_v14_t), offsetof(ncclRma_v14_t, connect), offsetof(ncclRma_v14_t, iputSignal),
                          offsetof(ncclRma_v14_t, finalize), sizeof(ncclRmaConfig_v14_t), sizeof(ncclNetProperties_v12_t),
                          offsetof(ncclNetProperties_v12_t, ptrSupport), offsetof(ncclNetProperties_v12_t, maxRecvs),
                          offsetof(ncclNetProperties_v12_t, netDeviceType), offsetof(ncclNetProperties_v12_t, maxP2pBytes),
                          offsetof(ncclNetProperties_v12_t, planeId)})
        std::printf("%zu\n", number);
    return 0;
}
