//! Pinned memory that the primary context lends.

use super::*;

#[test]
fn memory_of_another_context_borrows_pinned_memory_of_the_primary_one() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    books(|books| books.retained.insert(1, 1));
    for _ in 0..2 {
        let mut out = [0; 8];
        // SAFETY: a whole array.
        unsafe { driver.copy_from_device(1, out.as_mut_ptr(), ADDR, 8) }.unwrap();
        assert_eq!(out, [CONTENT; 8]);
    }
    let (streams, long) = (called("cuStreamCreateWithPriority"), vec![0; 1 << 20]);
    // SAFETY: a whole vector.
    unsafe { driver.copy_to_device(1, ADDR, long.as_ptr(), long.len()) }.unwrap();
    let waits = (called("cuStreamQuery"), called("cuStreamSynchronize"));
    assert_eq!((waits, called("cuStreamCreateWithPriority")), ((2, 1), streams + 1), "too long for it");
    // Any other copy can be given up, and then what was lent is lost as well.
    fail("cuStreamQuery", CudaStatus::NOT_READY);
    assert!(matches!(send(&driver, 1, ADDR), Err(Error::Timeout { .. })));
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (2, 1)));
    succeed();
    send(&driver, 1, ADDR).unwrap();
    fail("cuMemcpyHtoDAsync", CudaStatus::INVALID_VALUE);
    send(&driver, 1, ADDR).unwrap_err();
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (3, 2)));
    fail("cuStreamQuery", CudaStatus::ILLEGAL_ADDRESS);
    send(&driver, 1, ADDR).unwrap_err();
    succeed();
    send(&driver, 1, ADDR).unwrap();
    assert_eq!(called("cuStreamSynchronize"), 1, "of the long one");
    books(|books| {
        assert!(books.copies.iter().all(|&(context, ..)| context == APPLICATION));
        assert_eq!(books.contexts, [APPLICATION]);
        assert_eq!((books.streams.len(), books.pinned.len()), (4, 3));
    });
    drop(driver);
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (3, 2), "what was lost"));
}

#[test]
fn a_primary_context_without_pinned_memory_lends_none() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    // Makes the primary context.
    driver.alloc(1, 1, AllocKind::Malloc).unwrap();
    fail("cuMemHostAlloc", CudaStatus::OUT_OF_MEMORY);
    send(&driver, 1, ADDR).unwrap();
    assert_eq!((called("cuStreamSynchronize"), books(|books| books.copies[0].0)), (1, APPLICATION));
}
