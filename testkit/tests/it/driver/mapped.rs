use super::*;
use gdsync_testkit::driver::gdr;

#[test]
fn mappings_show_what_streams_write() {
    let rig = Rig::new();
    let stream = rig.stream();
    let gdr = gdr().unwrap();
    for device in 0..2 {
        let other = application_context(device);
        assert_eq!(cuda!(ctx_push_current(other)), 0);
        let buffer = gdr.alloc(device, 4096).unwrap();
        let mapping = buffer.map().unwrap();
        let stream = rig.stream();
        mapping.store(8, 5_u64).unwrap();
        assert_eq!(batch(stream, &[wait(buffer.addr() + 8, 5, EQUAL), write(buffer.addr(), 6)]), 0);
        assert_eq!(cuda!(stream_synchronize(stream)), 0);
        assert_eq!(mapping.load::<u64>(0).unwrap(), 6);
        assert_ne!(mapping.as_ptr() as u64, buffer.addr());
        // Memory of CUDA's is mapped by its address, and the library's copies run on the driver.
        let mut bytes = [0; 8];
        buffer.copy_out(0, &mut bytes).unwrap();
        assert_eq!(bytes, 6_u64.to_ne_bytes());
        drop(buffer);
        assert_eq!(mapping.load::<u64>(0).unwrap(), 6);
        assert_eq!(cuda!(ctx_pop_current(&mut 0)), 0);
        destroy_context(other);
    }
    let words = rig.words(3);
    let mapping = gdr.map(words.at(1), 16).unwrap();
    assert_eq!(batch(stream, &[write(words.at(2), 7)]), 0);
    assert_eq!(cuda!(stream_synchronize(stream)), 0);
    assert_eq!(mapping.load::<u64>(8).unwrap(), 7);
    assert!(matches!(gdr.map(words.at(1), 17), Err(Error::BeyondAllocation { size: 24, .. })));
    assert!(matches!(gdr.map(8, 8), Err(Error::NotMappable { .. })));
    drop(mapping);
    words.free();
    assert_eq!(cuda!(stream_destroy(stream)), 0);
    drop(gdr);
    rig.nothing_is_left();
}
