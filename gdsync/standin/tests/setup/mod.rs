//! What test programs over the stand-in do before they begin.

use std::env;

/// Names the libraries, the device and the route. Before `main`: there must be no other thread.
pub(crate) fn use_the_stand_in(route: &str) {
    let test = env::current_exe().unwrap_or_default();
    let mut places = test.ancestors().skip(1).take(2).map(|dir| dir.join("librdma_standin.so"));
    let Some(library) = places.find(|path| path.exists()) else { return };
    for (name, value) in [
        ("GDSYNC_LIBIBVERBS", library.as_os_str()),
        ("GDSYNC_LIBMLX5", library.as_os_str()),
        ("GDSYNC_TEST_DEVICE", "mlx5_standin".as_ref()),
        ("GDSYNC_PATH", route.as_ref()),
    ] {
        // SAFETY: the caller vouches that there is no other thread.
        unsafe { env::set_var(name, value) };
    }
}

/// How the device of the tests is used, and what its packets travel over.
pub(crate) fn used() -> (String, String) {
    let context = gdsync::verbs::Device::find(Some("mlx5_standin")).unwrap().open().unwrap();
    (context.description().to_owned(), context.wire().to_owned())
}
