//! `gdrcopy_copylat`: time of copies through a CPU mapping of GPU memory, by size.

fn main() -> std::process::ExitCode {
    gdasync::tools::main::<gdasync::tools::Copylat>()
}
