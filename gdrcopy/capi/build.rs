//! How the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The name under which programs that were linked to GDRCopy's library look for it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgdrapi.so.2");
    // Some versions of libfabric close the library right after they start, while threads have data with destructors in
    // it and `fork` has a handler. So it stays once it is loaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
