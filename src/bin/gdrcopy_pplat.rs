//! `gdrcopy_pplat`: round trips between CPU and a running kernel.

fn main() -> std::process::ExitCode {
    gdasync::tools::main::<gdasync::tools::Pplat>()
}
