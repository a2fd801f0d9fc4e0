//! The module without a GPU driver that it can use.

use super::rig::Raw;
use crate::gdrdrv_abi as abi;

#[test]
fn pins_of_addresses_are_enodev_and_all_else_works() {
    if std::env::var("GDRCOPY_TEST_KMOD_DRIVER").as_deref() != Ok("none") {
        println!("skipped: GDRCOPY_TEST_KMOD_DRIVER does not say that there is none");
        return;
    }
    let raw = Raw::open();
    for _ in 0..100 {
        assert_eq!(raw.pin(1 << 40, 65536), Err(libc::ENODEV));
        assert_eq!(raw.pin_v1(1 << 40, 65536), Err(libc::ENODEV));
    }
    // What is wrong with the request is told first.
    assert_eq!(raw.pin(0, 65536), Err(libc::EINVAL));
    assert_eq!(raw.unpin(0), Err(libc::EINVAL));
    assert_eq!(raw.attribute(abi::ATTR_PERSISTENT), Ok(1));
}
