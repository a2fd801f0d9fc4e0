//! The compiled kernels of the examples are those of their sources, with the parameters that the programs pass.

use std::path::Path;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/kernels").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[track_caller]
fn matches(name: &str, kernels: &[(&str, &str)]) {
    let (source, ptx) = (read(&format!("{name}.cu")), read(&format!("{name}.ptx")));
    assert!(ptx.contains(".target sm_70") && ptx.contains(".version 8.0"));
    assert_eq!(ptx.matches(".visible .entry ").count(), kernels.len());
    for (kernel, parameter) in kernels {
        let name = format!(" {kernel}(");
        let is_kernel = |line: &str| line.contains("__global__ void ") && line.contains(&name);
        assert!(source.lines().any(is_kernel), "{kernel}");
        assert!(ptx.contains(&format!(".visible .entry {kernel}(\n\t.param {parameter}\n)")), "{kernel}");
    }
}

#[test]
fn kernels_of_the_ping_pong() {
    matches(
        "pingpong",
        &[
            ("stamp", ".u64 stamp_param_0"),
            ("work", ".u64 work_param_0"),
            ("turn", ".align 8 .b8 turn_param_0[72]"),
            ("initiate", ".align 8 .b8 initiate_param_0[104]"),
        ],
    );
}

#[test]
fn kernels_of_jacobi() {
    matches("jacobi2d", &[("relax", ".align 8 .b8 relax_param_0[48]")]);
    // What a fused multiply-add rounds once, the CPU rounds twice.
    assert!(!read("jacobi2d.ptx").contains("fma."));
}
