//! `gdrcopy_sanity`: is everything about CPU mappings of GPU memory right on this machine?

fn main() -> std::process::ExitCode {
    gdasync::tools::main::<gdasync::tools::Sanity>()
}
