"""Where does visual counting break? (arXiv:2605.30170)"""
