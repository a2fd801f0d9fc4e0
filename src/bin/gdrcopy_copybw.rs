//! `gdrcopy_copybw`: bandwidth of copies through a CPU mapping of GPU memory.

fn main() -> std::process::ExitCode {
    gdasync::tools::main::<gdasync::tools::Copybw>()
}
