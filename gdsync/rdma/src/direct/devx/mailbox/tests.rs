//! Command bytes, written out by hand.

use super::*;

/// Nonzero bytes and their offsets.
fn written(command: &Command) -> Vec<(usize, u8)> {
    command.bytes().iter().copied().enumerate().filter(|&(_, byte)| byte != 0).collect()
}

#[test]
fn create_cq_bytes() {
    let command = create_cq(&CqFields {
        log_entries: 10,
        uar_page: 0x12_3456,
        eqn: 0x9a,
        ring: Place { umem: 0x0b0c_0d0e, offset: 0x1_0000 },
        record: Place { umem: 0x71, offset: 0x1f8 },
    });
    assert_eq!((command.bytes().len(), command.answer), (272, 16));
    let context = 16;
    let expected = [
        (0, 4),
        (context, 0x02),
        (context + 1, 0x02),
        (context + 7, 0x71),
        (context + 12, 10),
        (context + 13, 0x12),
        (context + 14, 0x34),
        (context + 15, 0x56),
        (context + 23, 0x9a),
        (context + 62, 0x01),
        (context + 63, 0xf8),
        (85, 0x01),
        (88, 0x0b),
        (89, 0x0c),
        (90, 0x0d),
        (91, 0x0e),
        (92, 0x80),
    ];
    assert_eq!(written(&command), expected);
}

#[test]
fn create_qp_bytes() {
    let command = create_qp(&QpFields {
        pdn: 0x11_2233,
        send_cqn: 0x44_5566,
        recv_cqn: 0x77_8899,
        log_sq: 9,
        log_rq: 5,
        log_rq_stride: 2,
        uar_page: 0x0a_0b0c,
        rings: Place { umem: 0x21, offset: 0x40 },
        record: Place { umem: 0x22, offset: 0x800 },
    });
    assert_eq!((command.bytes().len(), command.answer), (272, 16));
    let context = 24;
    let expected = [
        (0, 5),
        (context + 2, 0x18),
        (context + 5, 0x11),
        (context + 6, 0x22),
        (context + 7, 0x33),
        (context + 9, 5 << 3 | 2),
        (context + 10, 9 << 3),
        (context + 13, 0x0a),
        (context + 14, 0x0b),
        (context + 15, 0x0c),
        (context + 125, 0x44),
        (context + 126, 0x55),
        (context + 127, 0x66),
        (context + 157, 0x77),
        (context + 158, 0x88),
        (context + 159, 0x99),
        (context + 166, 0x08),
        (context + 208, 0x10),
        (context + 231, 0x22),
        (263, 0x40),
        (267, 0x21),
        (268, 0x80),
    ];
    assert_eq!(written(&command), expected);
}

#[test]
fn commands_without_a_context_are_short() {
    let command = end(Opcode::ToErr, 0xab_cdef);
    assert_eq!((command.bytes().len(), command.answer), (16, 16));
    assert_eq!(written(&command), [(0, 5), (1, 7), (9, 0xab), (10, 0xcd), (11, 0xef)]);
    let command = query_qp(3);
    assert_eq!((written(&command), command.answer), (vec![(0, 5), (1, 0x0b), (11, 3)], 272));
    let command = query_hca_cap();
    assert_eq!((written(&command), command.answer), (vec![(0, 1), (7, 1)], 4112));
    let command = step(Opcode::Rts2Rts, 1, 0x40);
    assert_eq!(written(&command), [(0, 5), (1, 5), (11, 1), (19, 0x40)]);
}

#[test]
fn answers_are_read() {
    let mut answer = [0; 4112];
    answer[0] = 0x03;
    answer[4..8].copy_from_slice(&[0x00, 0x3b, 0x29, 0xff]);
    answer[8..12].copy_from_slice(&[0xee, 0x12, 0x34, 0x56]);
    let status = Status::of(&answer);
    assert_eq!(status, Status { status: 3, syndrome: 0x3b_29ff });
    assert_eq!((status.name(), created(&answer)), ("bad parameter", 0x12_3456));
    (answer[16 + 0x11], answer[16 + 0x19]) = (15, 22);
    assert_eq!(Limits::of(&answer), Limits { log_max_qp: 15, log_max_cq: 22 });
    answer[24] = 0x6f;
    assert_eq!(queried_state(&answer), 6);
}
