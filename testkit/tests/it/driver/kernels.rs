use super::*;
use gdsync_testkit::driver::kernel;

/// Adds its second parameter to the word that the first one names.
fn add(params: &[*mut c_void]) {
    // SAFETY: as registered below.
    let addr = unsafe { params[0].cast::<u64>().read() };
    // SAFETY: as above.
    let value = unsafe { params[1].cast::<u32>().read() };
    let word = std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap());
    // SAFETY: the tests pass words of GPU memory.
    unsafe { AtomicU64::from_ptr(word) }.fetch_add(value.into(), Ordering::SeqCst);
}

/// A module with the kernels of these tests.
pub(super) struct Module {
    pub(super) module: Handle,
    pub(super) add: Handle,
    pub(super) fails: Handle,
}

impl Module {
    pub(super) fn load() -> Self {
        kernel("add", &[8, 4], add);
        kernel("fails", &[], |_| panic!("a kernel that fails, as it should"));
        let (mut module, mut functions) = (0, [0; 2]);
        assert_eq!(cuda!(module_load_data(&mut module, c"image".as_ptr().cast())), 0);
        for (function, name) in functions.iter_mut().zip([c"add", c"fails"]) {
            assert_eq!(cuda!(module_get_function(function, module, name.as_ptr())), 0);
        }
        let [add, fails] = functions;
        Self { module, add, fails }
    }
}

/// Launches `add`. The parameters die with the call.
pub(super) fn launch_add(function: Handle, stream: Handle, mut addr: u64, mut value: u32) -> u32 {
    let mut params = [std::ptr::from_mut(&mut addr).cast(), std::ptr::from_mut(&mut value).cast::<c_void>()];
    let none = std::ptr::null_mut();
    let status = cuda!(launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params.as_mut_ptr(), none));
    (addr, value) = (u64::MAX, u32::MAX);
    std::hint::black_box((addr, value));
    status
}

#[test]
fn kernels_get_copies_of_their_parameters() {
    let rig = Rig::new();
    let (words, stream, module) = (rig.words(2), rig.stream(), Module::load());
    assert_eq!(batch(stream, &[wait(words.at(1), 1, 0)]), 0);
    for value in 1..=10 {
        assert_eq!(launch_add(module.add, stream, words.at(0), value), 0);
    }
    words.set(1, 1);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(words.get(0), 55);
    assert_eq!(cuda!(func_load(module.add)), 0);
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    words.free();
    assert_eq!(cuda!(module_unload(module.module)), 0);
    rig.nothing_is_left();
    for status in
        [cuda!(func_load(module.add)), cuda!(module_unload(module.module)), launch_add(module.add, 0, 0, 0)]
    {
        assert_eq!(status, INVALID_HANDLE);
    }
}

#[test]
fn modules_come_and_go_when_the_gpu_is_idle() {
    let rig = Rig::new();
    let (gate, stream, module) = (rig.words(1), rig.stream(), Module::load());
    assert_eq!(batch(stream, &[wait(gate.at(0), 1, 0)]), 0);
    rig.control.patience(Duration::from_millis(10));
    let mut another = 0;
    let mut load = || cuda!(module_load_data(&mut another, c"image".as_ptr().cast()));
    assert_eq!([load(), cuda!(module_unload(module.module))], [702; 2]);
    assert_eq!((rig.control.stalled(), rig.control.alive().modules), (2, 1));
    // Its kernels run meanwhile.
    assert_eq!(launch_add(module.add, 0, gate.at(0), 0), 0);
    rig.control.frees_wait(false);
    assert_eq!(load(), 0);
    rig.control.frees_wait(true);
    rig.control.patience(Duration::from_secs(60));
    gate.set(0, 1);
    assert_eq!([cuda!(module_unload(module.module)), cuda!(module_unload(another))], [0; 2]);
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    gate.free();
    rig.nothing_is_left();
}

#[test]
fn wrong_modules_kernels_and_launches_are_refused() {
    let rig = Rig::new();
    let (stream, module) = (rig.stream(), Module::load());
    let mut handle = 0;
    assert_eq!(cuda!(module_get_function(&mut handle, module.module, c"unheard of".as_ptr())), 500);
    assert_eq!(cuda!(module_get_function(&mut handle, 5, c"add".as_ptr())), INVALID_HANDLE);
    assert_eq!(cuda!(module_load_data(&mut handle, std::ptr::null())), 200);
    let none = std::ptr::null_mut();
    let launch = |grid, block, params, extra, stream| {
        cuda!(launch_kernel(module.add, grid, 1, 1, block, 1, 1, 0, stream, params, extra))
    };
    let mut nulls = [std::ptr::null_mut(); 2];
    let params = nulls.as_mut_ptr();
    for status in [
        launch(0, 1, params, none, stream),
        launch(1, 1025, params, none, stream),
        launch(1, 1, none, none, stream),
        launch(1, 1, params, none, stream),
        launch(1, 1, params, params, stream),
    ] {
        assert_eq!(status, INVALID_VALUE);
    }
    assert_eq!(launch(1, 1, params, none, 77), INVALID_HANDLE);
    let other = application_context(0);
    assert_eq!(cuda!(ctx_push_current(other)), 0);
    assert_eq!(launch_add(module.add, 0, 0, 0), INVALID_HANDLE, "a function of another context");
    assert_eq!(cuda!(ctx_pop_current(&mut handle)), 0);
    destroy_context(other);
}

#[test]
fn a_kernel_that_fails_fails_its_context() {
    let rig = Rig::new();
    let (words, stream, module) = (rig.words(1), rig.stream(), Module::load());
    let none = std::ptr::null_mut();
    assert_eq!(cuda!(launch_kernel(module.fails, 1, 1, 1, 1, 1, 1, 0, stream, none, none)), 0);
    eventually("failed", || cuda!(stream_query(stream)) == LAUNCH_FAILED);
    assert_eq!(batch(stream, &[write(words.at(0), 1)]), LAUNCH_FAILED);
    assert_eq!(cuda!(stream_synchronize(stream)), LAUNCH_FAILED);
    assert_eq!(words.get(0), 0);
}
