//! How the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The name under which programs look for it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgdasync.so.0");
    // Its threads and the fork handlers of its crates stay.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
