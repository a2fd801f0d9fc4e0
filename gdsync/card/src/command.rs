//! The frame of a write command: which command, its structures, and where its responses go.

use rustix::io::Errno;

use crate::abi::{self, Plain, read_padded};
use crate::user::{Place, User};

/// A command as the program wrote it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command<'a> {
    /// Its number, with `IB_USER_VERBS_CMD_FLAG_EXTENDED`.
    pub(crate) number: u32,
    /// Structure of the core, followed in old commands by that of the driver.
    input: &'a [u8],
    /// Structure of the driver of an extended command.
    driver_input: &'a [u8],
    /// Where both responses of an old command go, or that of the core.
    output: Place,
    driver_output: Place,
}

const HEADER: usize = size_of::<abi::ib_uverbs_cmd_hdr>();
const EX_HEADER: usize = size_of::<abi::ib_uverbs_ex_cmd_hdr>();

/// Commands without a response.
const SILENT: [u32; 7] = [
    abi::IB_USER_VERBS_CMD_DEALLOC_PD,
    abi::IB_USER_VERBS_CMD_DESTROY_AH,
    abi::IB_USER_VERBS_CMD_DEREG_MR,
    abi::IB_USER_VERBS_CMD_MODIFY_QP,
    abi::IB_USER_VERBS_CMD_MODIFY_SRQ,
    abi::IB_USER_VERBS_CMD_ATTACH_MCAST,
    abi::IB_USER_VERBS_CMD_DETACH_MCAST,
];

impl<'a> Command<'a> {
    /// Parses what a program wrote (`verify_hdr` of the kernel).
    ///
    /// # Errors
    /// `EINVAL` if the lengths do not add up.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Errno> {
        let rest = bytes.get(HEADER..).ok_or(Errno::INVAL)?;
        let header: abi::ib_uverbs_cmd_hdr = read_padded(bytes);
        let (inputs, outputs) = (usize::from(header.in_words), usize::from(header.out_words));
        if header.command & abi::IB_USER_VERBS_CMD_FLAG_EXTENDED == 0 {
            if inputs * 4 != bytes.len() {
                return Err(Errno::INVAL);
            }
            let silent = SILENT.contains(&header.command) || outputs == 0;
            let addr = if silent { 0 } else { read_padded(rest.get(..8).ok_or(Errno::INVAL)?) };
            let output = Place { addr, len: if silent { 0 } else { outputs * 4 } };
            let (driver_input, driver_output) = (&[][..], Place::default());
            return Ok(Self { number: header.command, input: rest, driver_input, output, driver_output });
        }
        let extension: abi::ib_uverbs_ex_cmd_hdr = read_padded(rest.get(..EX_HEADER).ok_or(Errno::INVAL)?);
        let rest = &rest[EX_HEADER..];
        let driver_inputs = usize::from(extension.provider_in_words);
        let driver_outputs = usize::from(extension.provider_out_words);
        if (inputs + driver_inputs) * 8 != rest.len() || extension.cmd_hdr_reserved != 0 {
            return Err(Errno::INVAL);
        }
        if (extension.response == 0) != (outputs + driver_outputs == 0) {
            return Err(Errno::INVAL);
        }
        let (input, driver_input) = rest.split_at(inputs * 8);
        let all = Place { addr: extension.response, len: (outputs + driver_outputs) * 8 };
        let output = Place { len: outputs * 8, ..all };
        let driver_output = all.after(outputs * 8);
        Ok(Self { number: header.command, input, driver_input, output, driver_output })
    }

    fn is_extended(&self) -> bool {
        self.number & abi::IB_USER_VERBS_CMD_FLAG_EXTENDED != 0
    }

    /// The structure of the core.
    ///
    /// # Errors
    /// `ENOSPC` for an old command that is shorter. Missing fields of an extended one are 0, as in the kernel.
    pub(crate) fn request<T: Plain>(&self) -> Result<T, Errno> {
        if !self.is_extended() && self.input.len() < size_of::<T>() {
            return Err(Errno::NOSPC);
        }
        Ok(read_padded(self.input))
    }

    /// The structure of the driver, behind a core structure `C`; missing fields are 0.
    pub(crate) fn driver_request<C: Plain, T: Plain>(&self) -> T {
        if self.is_extended() {
            return read_padded(self.driver_input);
        }
        read_padded(self.input.get(size_of::<C>()..).unwrap_or_default())
    }

    /// Bytes of the structure of the driver, behind a core structure `C`.
    pub(crate) fn driver_len<C: Plain>(&self) -> usize {
        if self.is_extended() {
            self.driver_input.len()
        } else {
            self.input.len().saturating_sub(size_of::<C>())
        }
    }

    /// Bytes of the response that the program has room for.
    pub(crate) fn response_len(&self) -> usize {
        self.output.len
    }

    /// Checks the room for a response of the core.
    ///
    /// # Errors
    /// `ENOSPC` if an old command has less.
    pub(crate) fn check_response<T: Plain>(&self) -> Result<(), Errno> {
        if !self.is_extended() && self.output.len < size_of::<T>() { Err(Errno::NOSPC) } else { Ok(()) }
    }

    /// Writes the response of the core.
    pub(crate) fn respond<T: Plain>(&self, user: &dyn User, response: &T) -> Result<(), Errno> {
        self.check_response::<T>()?;
        self.output.put(user, response)
    }

    /// Writes the response of the core, and behind it that of the driver.
    pub(crate) fn respond_both<C: Plain, D: Plain>(
        &self,
        user: &dyn User,
        core: &C,
        driver: &D,
    ) -> Result<(), Errno> {
        self.respond(user, core)?;
        self.driver_place::<C>().put(user, driver)
    }

    /// Writes a response of the driver that is only bytes.
    pub(crate) fn respond_driver_bytes<C: Plain>(&self, user: &dyn User, bytes: &[u8]) -> Result<(), Errno> {
        let place = self.driver_place::<C>();
        user.write(place.addr, &bytes[..bytes.len().min(place.len)])
    }

    /// Bytes of the driver's response that the program has room for.
    pub(crate) fn driver_response_len<C: Plain>(&self) -> usize {
        self.driver_place::<C>().len
    }

    fn driver_place<C: Plain>(&self) -> Place {
        if self.is_extended() { self.driver_output } else { self.output.after(size_of::<C>()) }
    }
}

/// The name of a command, for the log.
pub(crate) fn name(number: u32) -> &'static str {
    const NAMES: [&str; 41] = [
        "GET_CONTEXT",
        "QUERY_DEVICE",
        "QUERY_PORT",
        "ALLOC_PD",
        "DEALLOC_PD",
        "CREATE_AH",
        "MODIFY_AH",
        "QUERY_AH",
        "DESTROY_AH",
        "REG_MR",
        "REG_SMR",
        "REREG_MR",
        "QUERY_MR",
        "DEREG_MR",
        "ALLOC_MW",
        "BIND_MW",
        "DEALLOC_MW",
        "CREATE_COMP_CHANNEL",
        "CREATE_CQ",
        "RESIZE_CQ",
        "DESTROY_CQ",
        "POLL_CQ",
        "PEEK_CQ",
        "REQ_NOTIFY_CQ",
        "CREATE_QP",
        "QUERY_QP",
        "MODIFY_QP",
        "DESTROY_QP",
        "POST_SEND",
        "POST_RECV",
        "ATTACH_MCAST",
        "DETACH_MCAST",
        "CREATE_SRQ",
        "MODIFY_SRQ",
        "QUERY_SRQ",
        "DESTROY_SRQ",
        "POST_SRQ_RECV",
        "OPEN_XRCD",
        "CLOSE_XRCD",
        "CREATE_XSRQ",
        "OPEN_QP",
    ];
    const EXTENDED: [&str; 8] = [
        "CREATE_FLOW",
        "DESTROY_FLOW",
        "CREATE_WQ",
        "MODIFY_WQ",
        "DESTROY_WQ",
        "CREATE_RWQ_IND_TBL",
        "DESTROY_RWQ_IND_TBL",
        "MODIFY_CQ",
    ];
    let index = (number & !abi::IB_USER_VERBS_CMD_FLAG_EXTENDED) as usize;
    let extended = index.checked_sub(50).and_then(|at| EXTENDED.get(at));
    NAMES.get(index).or(extended).copied().unwrap_or("of an unknown number")
}
