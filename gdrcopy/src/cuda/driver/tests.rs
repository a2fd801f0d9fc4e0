use super::*;

#[test]
fn pci_addresses_become_those_of_sysfs() {
    assert_eq!(sysfs_address("0000:0F:00.0").unwrap(), "0000:0f:00.0");
    assert_eq!(sysfs_address("00000000:C1:1F.7").unwrap(), "0000:c1:1f.7");
    assert_eq!(sysfs_address("00010000:01:00.0").unwrap(), "10000:01:00.0");
    for wrong in ["", "0F:00.0", "0000:0F:00", "0000:0F:00.0.1", "0000:xx:00.0"] {
        assert_eq!(sysfs_address(wrong), None, "{wrong}");
    }
}

#[test]
fn a_machine_without_libcuda_says_what_to_install() {
    match Driver::load() {
        Err(error @ Error::Sys { .. }) => {
            let text = error.to_string();
            assert!(text.contains("libcuda") && text.contains("install the NVIDIA driver"), "{text}");
            assert_eq!(error.errno(), libc::ENOENT);
        }
        other => println!("skipped: there is a libcuda here: {other:?}"),
    }
}
