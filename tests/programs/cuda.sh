# shellcheck shell=bash
# What families of CUDA programs use: our C libraries, and CUDA.

# c_libraries NAME...: builds of gdsync/capi and others, as their installation names them, in $lib. C_LIBRARIES=FOLDER has them built.
c_libraries() {
    lib=$out/lib
    mkdir -p "$lib"
    if [ -n "${C_LIBRARIES:-}" ]; then
        cp -P "$C_LIBRARIES"/lib* "$lib"
        return
    fi
    local name
    (cd "$repository" && timeout 1800 cargo build --quiet "${@/#/--package=}" --package gdsync-simulated-cuda)
    for name in gdrapi gdsync_c mp_c; do
        [ ! -e "$target/debug/lib$name.so" ] ||
            ln -sf "$target/debug/lib$name.so" "$lib/lib${name%_c}.so.2"
    done
    for name in "$lib"/lib*.so.2; do
        ln -sf "$(basename "$name")" "${name%.2}"
    done
    ln -sf "$target/debug/libsimulated_cuda.so" "$lib/libcuda.so.1"
    ln -sf libcuda.so.1 "$lib/libcuda.so"
}

# cuda: sets `has_gpu`, the array `cuda` of flags to compile with, and `cuda_libraries` to link with. Without a GPU the simulated
# driver and a runtime over it are in $lib, and headers come from NVIDIA's wheels.
cuda() {
    local wheels=$target/programs-cuda
    if has_gpu=1 && command -v nvcc >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        local home
        home=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
        rm -f "$lib"/libcuda.so*
        cuda=(-I "$home/include")
        cuda_libraries=(-L "$home/lib64" -L "$home/lib64/stubs" -lcudart -lcuda)
        return
    fi
    has_gpu=0
    if [ ! -e "$wheels/nvidia" ]; then
        mkdir -p "$wheels"
        python3 -m pip download --quiet --no-deps --dest "$wheels" nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 \
            nvidia-cuda-profiler-api==13.0.85 >"$out/pip.log" 2>&1 ||
            { echo "skipped: CUDA's headers cannot be had, see $out/pip.log" && exit 77; }
        for wheel in "$wheels"/*.whl; do
            python3 -m zipfile -e "$wheel" "$wheels"
        done
    fi
    cuda=(-I "$wheels/nvidia/cu13/include")
    gcc -shared -fPIC -O1 -Wall "${cuda[@]}" "$here"/suites/cuda/{driver,runtime}.c -o "$lib/libcudart.so" -L "$lib" -lcuda
    cuda_libraries=(-L "$lib" -lcudart -lcuda)
}
