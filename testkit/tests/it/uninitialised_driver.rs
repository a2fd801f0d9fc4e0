//! The simulated CUDA driver in a process that has not initialised it.

use gdrcopy::Error;
use gdrcopy::cuda::CudaStatus;
use gdsync_testkit::driver::api;
use gdsync_testkit::process::is_alone;

#[test]
fn nothing_but_the_version_works_before_initialisation() {
    if !is_alone("uninitialised_driver::nothing_but_the_version_works_before_initialisation") {
        return;
    }
    let (mut version, mut count) = (0, 0);
    // SAFETY: a place for the answer.
    unsafe { api().driver_get_version(&mut version) }.unwrap();
    // SAFETY: as above.
    let early = unsafe { api().device_get_count(&mut count) };
    assert!(matches!(early, Err(Error::Cuda { status: CudaStatus::NOT_INITIALIZED, .. })), "{early:?}");
    // SAFETY: no flags are defined.
    let flagged = unsafe { api().init(1) };
    assert!(matches!(flagged, Err(Error::Cuda { status: CudaStatus::INVALID_VALUE, .. })), "{flagged:?}");
    // SAFETY: as above.
    unsafe { api().init(0) }.unwrap();
    // SAFETY: a place for the answer.
    unsafe { api().device_get_count(&mut count) }.unwrap();
    assert_eq!((version, count), (13000, 2));
}
