//! Where and when `cuFlushGPUDirectRDMAWrites` is called.

use super::*;
use crate::cuda::raw::layout::RDMA_WRITES_ORDERING;

/// What GPU 1 says of the order of writes.
fn ordering(value: i32) {
    books(|books| books.device_attributes.insert((1, RDMA_WRITES_ORDERING), value));
}

#[test]
fn it_is_in_the_context_of_the_memory_and_makes_none() {
    let driver = driver();
    ordering(0);
    know_malloc(ADDR, APPLICATION + 1);
    driver.flush(1, ADDR).unwrap();
    books(|books| {
        assert_eq!((&books.flushes[..], books.retained.is_empty()), (&[APPLICATION + 1][..], true))
    });
    // Memory without a context of its own.
    know(ADDR, &[(attribute::MEMORY_TYPE, 2), (attribute::DEVICE_ORDINAL, 1)]);
    driver.flush(1, ADDR).unwrap();
    books(|books| assert_eq!(books.flushes[1..], [PRIMARY + 1]));
    assert!(matches!(driver.flush(1, 0x1234), Err(Error::NotMappable { addr: 0x1234, .. })));
}

#[test]
fn it_is_left_out_where_the_owner_sees_writes_anyway() {
    for (value, flushes) in [(0, 2), (99, 2), (100, 0), (200, 0)] {
        let driver = driver();
        ordering(value);
        know_malloc(ADDR, APPLICATION);
        (0..2).for_each(|_| driver.flush(1, ADDR).unwrap());
        assert_eq!(books(|books| books.flushes.len()), flushes, "{value}");
        assert_eq!(called("cuDeviceGetAttribute"), 1, "asked once");
    }
}

#[test]
fn a_driver_too_old_to_tell_is_asked_to_flush() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    fail("cuDeviceGetAttribute", CudaStatus::LAUNCH_FAILED);
    assert!(matches!(driver.flush(1, ADDR), Err(Error::Cuda { call: "cuDeviceGetAttribute", .. })));
    fail("cuDeviceGetAttribute", CudaStatus::INVALID_VALUE);
    driver.flush(1, ADDR).unwrap();
    assert_eq!(books(|books| books.flushes.len()), 1);
}
