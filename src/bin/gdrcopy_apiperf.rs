//! `gdrcopy_apiperf`: time of pinning, mapping, unmapping and unpinning.

fn main() -> std::process::ExitCode {
    gdasync::tools::main::<gdasync::tools::Apiperf>()
}
