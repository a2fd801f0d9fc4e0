//! How the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The name under which programs that ask it for failures find it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-rma-gda.so.0");
    // NCCL closes it with its last communicator; its threads and thread locals stay.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
