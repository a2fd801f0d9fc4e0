//! gdsync's own tests of queues, streams, graphs and processes, through mlx5 direct verbs on the stand-in. Those of verbs and wraps
//! are in `direct`.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

use std::env;

#[path = "../../../tests/devices.rs"]
mod devices;
#[path = "../../../tests/graphs.rs"]
mod graphs;
#[path = "../../../tests/graphs_model.rs"]
mod graphs_model;
#[path = "../../../tests/processes.rs"]
mod processes;
#[path = "../../../tests/queues.rs"]
mod queues;
#[path = "../../../tests/stream_queues.rs"]
mod stream_queues;
#[path = "../../../tests/streams.rs"]
mod streams;
#[path = "../../../tests/verbs_device.rs"]
mod verbs_device;

/// Runs before `main`, while there is one thread: names the libraries, the device and the route.
#[used]
#[unsafe(link_section = ".init_array")]
static NAME_THE_DEVICE: extern "C" fn() = {
    extern "C" fn name_the_device() {
        let test = env::current_exe().unwrap_or_default();
        let mut places = test.ancestors().skip(1).take(2).map(|dir| dir.join("librdma_standin.so"));
        let Some(library) = places.find(|path| path.exists()) else { return };
        for (name, value) in [
            ("GDSYNC_LIBIBVERBS", library.as_os_str()),
            ("GDSYNC_LIBMLX5", library.as_os_str()),
            ("GDSYNC_TEST_DEVICE", "mlx5_standin".as_ref()),
            ("GDSYNC_PATH", "direct".as_ref()),
        ] {
            // SAFETY: there is no other thread yet.
            unsafe { env::set_var(name, value) };
        }
    }
    name_the_device
};

#[test]
fn the_device_is_the_stand_in_and_its_rings_are_read_directly() {
    let context = gdsync::verbs::Device::find(Some("mlx5_standin")).unwrap().open().unwrap();
    assert_eq!((context.description(), context.wire()), ("mlx5 card mlx5_standin", "RoCE v2"));
}
