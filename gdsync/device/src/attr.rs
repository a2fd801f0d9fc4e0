//! Queue pair states, the attributes of each transition, and the rules between them
//! (`ibv_modify_qp(3)`, RC rows; InfiniBand architecture 10.3).

use super::address::QpAddress;
use super::qp_state::QpState;
use crate::error::{Error, Result};

bitflags::bitflags! {
    /// Access rights of a memory region or a queue pair (`enum ibv_access_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// The local HCA may write: needed for receives and for the results of READs and atomics.
        const LOCAL_WRITE = 1;
        /// Peers may RDMA WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may RDMA READ.
        const REMOTE_READ = 1 << 2;
        /// Peers may do atomics.
        const REMOTE_ATOMIC = 1 << 3;
    }
}

impl Access {
    /// The device may write payload to the memory region in any order (`IBV_ACCESS_RELAXED_ORDERING`). Many servers need this for full
    /// speed. Not in [`Access::all`]; ignored by old kernels and libraries, and by the software HCA.
    ///
    /// Only for payload that is read after its completion, which still comes last. Never for memory that is polled, such as flags and
    /// words that a stream waits for, or whose bytes must appear in order.
    pub const RELAXED_ORDERING: Self = Self::from_bits_retain(1 << 20);
}

/// Maximum number of outstanding READs and atomics of a queue pair, in each direction.
pub const MAX_RD_ATOMIC: u8 = 16;

/// Attributes of a transition; `None` is not given. See [`QpAttr::to`].
#[derive(Clone, Debug, Default)]
pub struct QpAttr {
    /// The target state.
    pub state: Option<QpState>,
    /// Access rights of peers (RESET to INIT).
    pub access: Option<Access>,
    /// The address of the peer (INIT to RTR).
    pub remote: Option<QpAddress>,
    /// Maximum path MTU in bytes, 256 to 4096 (INIT to RTR). A card uses the minimum of this, of its port's MTU and of
    /// [`QpAddress::mtu`]. The software HCA ignores it; its packets are larger.
    pub path_mtu: Option<u32>,
    /// Maximum number of outstanding READs and atomics of the peer, 0 to 16 (INIT to RTR).
    pub max_dest_rd_atomic: Option<u8>,
    /// Code of the delay requested from a sender that finds no receive, 0 to 31 (INIT to RTR).
    pub min_rnr_timer: Option<u8>,
    /// Acknowledge timeout `4.096 us * 2^timeout`, 0 to 31; 0 is infinite (RTR to RTS).
    pub timeout: Option<u8>,
    /// Retries after a timeout, 0 to 7 (RTR to RTS).
    pub retry_cnt: Option<u8>,
    /// Retries after "receiver not ready", 0 to 7; 7 is infinite (RTR to RTS).
    pub rnr_retry: Option<u8>,
    /// Maximum number of outstanding READs and atomics of this side, 0 to 16 (RTR to RTS).
    pub max_rd_atomic: Option<u8>,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, value: $type) -> Self {
            self.$name = Some(value);
            self
        }
    )*};
}

impl QpAttr {
    /// Starts a transition to `state`.
    pub fn to(state: QpState) -> Self {
        Self { state: Some(state), ..Self::default() }
    }

    setters! {
        /// Sets [`QpAttr::access`].
        access: Access,
        /// Sets [`QpAttr::remote`].
        remote: QpAddress,
        /// Sets [`QpAttr::path_mtu`].
        path_mtu: u32,
        /// Sets [`QpAttr::max_dest_rd_atomic`].
        max_dest_rd_atomic: u8,
        /// Sets [`QpAttr::min_rnr_timer`].
        min_rnr_timer: u8,
        /// Sets [`QpAttr::timeout`].
        timeout: u8,
        /// Sets [`QpAttr::retry_cnt`].
        retry_cnt: u8,
        /// Sets [`QpAttr::rnr_retry`].
        rnr_retry: u8,
        /// Sets [`QpAttr::max_rd_atomic`].
        max_rd_atomic: u8,
    }

    /// Name of each attribute, whether it is given, its value if numeric, and the rule that it breaks.
    fn given(&self) -> [(&'static str, bool, u32, Option<&'static str>); 9] {
        let numeric = |name, value: Option<u8>, most: u8, rule| {
            let number = value.unwrap_or(0);
            (name, value.is_some(), number.into(), (number > most).then_some(rule))
        };
        let timer = |name, value| numeric(name, value, 31, "at most 31");
        let count = |name, value| numeric(name, value, 7, "at most 7");
        let atomics = |name, value| numeric(name, value, MAX_RD_ATOMIC, "at most 16");
        let access = self.access.unwrap_or(Access::empty());
        let mtu = self.path_mtu.unwrap_or(256);
        let is_mtu = mtu.is_power_of_two() && (256..=4096).contains(&mtu);
        [
            (
                "access",
                self.access.is_some(),
                access.bits(),
                (!Access::all().contains(access)).then_some("of the known rights"),
            ),
            ("remote", self.remote.is_some(), 0, None),
            ("path_mtu", self.path_mtu.is_some(), mtu, (!is_mtu).then_some("256, 512, 1024, 2048 or 4096")),
            atomics("max_dest_rd_atomic", self.max_dest_rd_atomic),
            timer("min_rnr_timer", self.min_rnr_timer),
            timer("timeout", self.timeout),
            count("retry_cnt", self.retry_cnt),
            count("rnr_retry", self.rnr_retry),
            atomics("max_rd_atomic", self.max_rd_atomic),
        ]
    }

    /// Checks the ranges of all values.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub fn check_values(&self) -> Result<()> {
        let wrong = self.given().into_iter().find_map(|(name, _, value, rule)| Some((name, value, rule?)));
        wrong.map_or(Ok(()), |(name, value, rule)| Err(Error::invalid(name, value, rule)))
    }

    /// Checks the transition of queue pair `qpn` from `from` and returns the state it leads to. Steps of a datagram queue pair have
    /// no attributes.
    ///
    /// # Errors
    /// [`Error::Transition`] if there is no such step, or an attribute is missing, not allowed or out of range.
    pub fn check(&self, qpn: u32, from: QpState, is_datagram: bool) -> Result<QpState> {
        const INIT: &[&str] = &["access"];
        const RTR: &[&str] = &["remote", "path_mtu", "max_dest_rd_atomic", "min_rnr_timer"];
        const RTS: &[&str] = &["timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"];
        let to = self.state.unwrap_or(from);
        let fail = |why: String| Err(Error::Transition { qpn, from, to, why });
        if self.state.is_none() {
            return fail("no target state is given".into());
        }
        let (required, optional): (&[&str], &[&str]) = match (from, to) {
            (_, QpState::RESET | QpState::ERR) => (&[], &[]),
            (QpState::RESET, QpState::INIT) => (INIT, &[]),
            (QpState::INIT, QpState::INIT) => (&[], INIT),
            (QpState::INIT, QpState::RTR) => (RTR, INIT),
            (QpState::RTR, QpState::RTS) => (RTS, &["access", "min_rnr_timer"]),
            (QpState::RTS, QpState::RTS) => (&[], &["access", "min_rnr_timer"]),
            _ => {
                let order = "the order is RESET, INIT, RTR, RTS; ERR and RESET can be reached from any state";
                let reset = "reset it first (Qp::modify to RESET), or build another";
                return fail(match (from, to) {
                    (QpState::ERR, _) => format!("{order}: {reset}"),
                    (QpState::RTR | QpState::RTS, QpState::INIT | QpState::RTR) => {
                        format!("it is connected already; {reset}")
                    }
                    _ => order.into(),
                });
            }
        };
        let (required, optional): (&[&str], &[&str]) =
            if is_datagram { (&[], &[]) } else { (required, optional) };
        for (name, given, value, rule) in self.given() {
            if required.contains(&name) && !given {
                return fail(format!("attribute {name} is required"));
            }
            if given && !required.contains(&name) && !optional.contains(&name) {
                return fail(format!("attribute {name} is not allowed in this step"));
            }
            if let Some(rule) = rule {
                return fail(format!("attribute {name} is {value}, {rule} is allowed"));
            }
        }
        if let Some(remote) = self.remote
            && (remote.qpn >> 24 != 0 || remote.psn >> 24 != 0)
        {
            return fail(format!("attribute remote is {remote}, QPN and PSN have 24 bits"));
        }
        Ok(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gid;

    fn address() -> QpAddress {
        QpAddress::new(Gid([7; 16]), 0x12_3456, 0xab_cdef)
    }

    fn complete(to: QpState) -> QpAttr {
        let attr = QpAttr::to(to);
        match to {
            QpState::INIT => attr.access(Access::REMOTE_READ),
            QpState::RTR => attr.remote(address()).path_mtu(1024).max_dest_rd_atomic(16).min_rnr_timer(12),
            QpState::RTS => attr.timeout(14).retry_cnt(7).rnr_retry(7).max_rd_atomic(16),
            _ => attr,
        }
    }

    #[test]
    fn every_pair_of_states_is_allowed_or_explained() {
        let all = [QpState::RESET, QpState::INIT, QpState::RTR, QpState::RTS, QpState::ERR];
        for from in all {
            for to in all {
                let step = (from, to);
                let legal = matches!(to, QpState::RESET | QpState::ERR)
                    || matches!(step, (QpState::RESET | QpState::INIT, QpState::INIT))
                    || matches!(step, (QpState::INIT, QpState::RTR) | (QpState::RTR, QpState::RTS));
                let attr = if step == (QpState::RTS, QpState::RTS) { QpAttr::to(to) } else { complete(to) };
                let result = attr.check(1, from, false);
                assert_eq!(
                    result.is_ok(),
                    legal || step == (QpState::RTS, QpState::RTS),
                    "{from} -> {to}: {result:?}"
                );
                if let Err(error) = result {
                    let is_told = |what| error.to_string().contains(what);
                    let is_known =
                        is_told("the order is RESET, INIT, RTR, RTS") || is_told("it is connected already");
                    assert!(is_known, "{error}");
                }
            }
        }
    }

    #[test]
    fn missing_forbidden_and_large_attributes_are_named() {
        let text = |attr: QpAttr, from| attr.check(0x77, from, false).unwrap_err().to_string();
        assert!(text(QpAttr::to(QpState::INIT), QpState::RESET).contains("access is required"));
        assert!(
            text(complete(QpState::RTS).remote(address()), QpState::RTR).contains("remote is not allowed")
        );
        assert!(
            text(complete(QpState::RTS).retry_cnt(8), QpState::RTR).contains("retry_cnt is 8, at most 7")
        );
        assert!(text(complete(QpState::RTR).path_mtu(1000), QpState::INIT).contains("path_mtu is 1000"));
        let far = QpAddress { qpn: 1 << 24, ..address() };
        assert!(text(complete(QpState::RTR).remote(far), QpState::INIT).contains("24 bits"));
        assert!(text(QpAttr::default(), QpState::RTS).contains("no target state"));
        let missing = QpAttr { max_rd_atomic: None, ..complete(QpState::RTS) };
        assert!(text(missing, QpState::RTR).contains("QP 0x77"));
        assert_eq!(QpAttr::to(QpState::INIT).check(1, QpState::RESET, true).unwrap(), QpState::INIT);
        let refused = complete(QpState::RTR).check(1, QpState::INIT, true).unwrap_err().to_string();
        assert!(refused.contains("remote is not allowed"), "{refused}");
    }
}
