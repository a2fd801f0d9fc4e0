//! The name under which programs that were linked to GDRCopy's library look for it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgdrapi.so.2");
}
