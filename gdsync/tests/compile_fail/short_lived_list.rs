//! A work request borrows its list: one that is gone cannot be posted.

use gdsync::verbs::{Mr, Qp, RecvWr, SendWr};

fn main() {
    let _ = |qp: &Qp, mr: &Mr| {
        let send = {
            let list = vec![mr.sge(0, 8).unwrap()];
            SendWr::send(&list)
        };
        let receive = {
            let list = [mr.sge(0, 8).unwrap()];
            RecvWr::new(&list)
        };
        qp.post_send(&[send]).and(qp.post_recv(&[receive]))
    };
}
